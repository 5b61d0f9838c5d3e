"""Records: the published outcomes of cells, their samples, and how they are found."""
