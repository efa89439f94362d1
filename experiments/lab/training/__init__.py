"""Training of the model that ships: tokenizer, data, curriculum, loss and the run itself."""
