"""Questions and answers behind published values: columns for a page, the page, and a server for it."""
