"""Two programs over TCP that know one token: who they are, and frames that no other program can make or change. Imports core alone."""
