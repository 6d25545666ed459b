"""Makes a stock model fast on a CPU: packed linear layers, grouped attention, compiled decoder layers."""
