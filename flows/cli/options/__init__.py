"""The options of commands, and the configurations that they make."""
