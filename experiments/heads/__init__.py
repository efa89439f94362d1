"""Files that methods need, measured on a model: scores of heads, patterns of heads, budgets of layers."""
