"""The terminal's side of the command: tables, the live view, logs that are followed."""
