"""What the command shows in a terminal."""
