"""LASER (Artetxe & Schwenk 2019): sentence vectors of many languages in one space, learned by translation."""
