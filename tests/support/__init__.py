"""What tests share: families, configurations, processes that are killed, and made-up runs and nodes."""
