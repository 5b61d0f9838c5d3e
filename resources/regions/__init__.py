"""Regions: their devices and prices, their work pools and their Ray clusters."""
