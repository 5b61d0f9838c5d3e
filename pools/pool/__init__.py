"""The pool itself: its replicas decided and kept, its users, and pools that outlive their starter."""
