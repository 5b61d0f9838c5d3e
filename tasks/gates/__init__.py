"""Gates: GO or NO-GO from records."""
