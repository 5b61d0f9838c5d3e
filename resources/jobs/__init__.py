"""Jobs, independent of the backend that runs them: requests, handles, and what their processes may say."""
