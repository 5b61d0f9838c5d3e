"""Reports for people: tables, plots, comparisons, the page."""
