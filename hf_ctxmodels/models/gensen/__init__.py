"""GenSen (Subramanian et al. 2018): sentence vectors learned from several tasks at once."""
