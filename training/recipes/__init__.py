"""How the policies that ship were made: their data, their training, their measurement. Not a library."""
