"""Files that methods need, measured on a model: scores, patterns and room of heads, budgets and anchors of layers."""
