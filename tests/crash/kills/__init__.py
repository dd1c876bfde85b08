"""Real ends: training programs that SIGKILL ends, and a real filesystem that loses its power."""
