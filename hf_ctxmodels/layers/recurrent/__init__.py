"""LSTM and GRU layers over packed sequences, and recurrent decoders."""
