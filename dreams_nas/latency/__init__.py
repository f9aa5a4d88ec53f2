"""What a round of decoding costs on one deployment: measured tables, and predictions from them."""
