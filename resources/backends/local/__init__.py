"""The backend of this machine: a job is a supervised process."""
