"""LSTM and GRU layers over packed rows, and recurrent decoders."""
