"""Nested model families: what nesting means, and the paper's PreActResNet."""
