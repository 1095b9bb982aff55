"""Cases: their grammar, their operands, the float64 reference."""
