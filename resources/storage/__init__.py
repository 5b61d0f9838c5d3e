"""Files in any store: reading, listing, copying, and replacing them safely under concurrent writers."""
