"""What a save need not write again, because another checkpoint of the run has it; and what stays for that reason. May import what `save` may (ADR-0044)."""
