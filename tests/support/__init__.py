"""What tests share: model families, configurations, processes that are killed, made-up runs, a fleet in one process."""
