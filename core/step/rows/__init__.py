"""A step on a state that is cut by rows over ranks. Imports the state and layouts; of the step only its optimizer."""
