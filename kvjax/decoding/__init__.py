"""The traced core: prefill, extend and decode of a model over the storage of a method, on one device."""
