"""Running cells: served, claimed, attempted, announced."""
