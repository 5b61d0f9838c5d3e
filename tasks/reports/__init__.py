"""Reports: tables, plots, comparisons, and the report page."""
