"""Nested model families: the contract of nesting, the models' files, and the paper's PreActResNet."""
