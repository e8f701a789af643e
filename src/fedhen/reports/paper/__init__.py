"""The paper's tables and figures from our runs, compared with the paper's values."""
