"""Methods made of methods: stages, layers of their own, periodic eviction, top-p, sparse prompts, budgets of layers."""
