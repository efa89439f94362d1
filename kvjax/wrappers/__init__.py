"""Methods made of methods: stages, a method per layer, periodic eviction, top-p, sparse prefill, budgets of layers."""
