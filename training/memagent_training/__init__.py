"""Trains policies: from logged runs, in a closed loop with the reader, and the policies that ship."""
