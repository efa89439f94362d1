"""The protocol of methods: what a method declares, its fields, and families that need only one or two functions."""
