"""What each evaluator can be told beyond the benchmarks, one module an evaluator."""
