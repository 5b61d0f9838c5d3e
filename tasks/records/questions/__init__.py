"""Questions of records by their own words, and the flags that searches of training texts gave them."""
