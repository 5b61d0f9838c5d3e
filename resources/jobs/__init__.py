"""Jobs, independent of the backend that runs them: requests, handles, and messages of their processes."""
