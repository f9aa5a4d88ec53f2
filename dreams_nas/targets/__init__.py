"""The model being accelerated: the `Target` protocol and its adapters to Hugging Face families."""
