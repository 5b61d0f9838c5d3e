"""Files wherever they lie: reading, listing, copying, and replacing them without losing a race."""
