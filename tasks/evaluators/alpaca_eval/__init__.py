"""AlpacaEval."""
