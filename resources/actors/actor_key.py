"""The secret that actors and their callers share."""

from __future__ import annotations

from resources.jobs.user_key import USER_KEY_VARIABLE, user_key


def actor_variables() -> dict[str, str]:
    """Returns the variables that a job on another machine needs to call actors and read results of this user."""
    return {USER_KEY_VARIABLE: user_key().decode()}
