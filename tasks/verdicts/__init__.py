"""Verdicts: better, worse or no change, from records alone: comparisons, gates, alerts, qualification of builds."""
