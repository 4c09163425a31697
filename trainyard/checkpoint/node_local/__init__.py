"""Steps that lie in the folders of several nodes, a part of each in every folder."""
