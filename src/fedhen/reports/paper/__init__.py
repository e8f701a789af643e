"""The paper's tables and figures, beside the paper's own values."""
