"""CUDA sources that are compiled at run time, and their manifest. Nothing here runs on the host but the
manifest's parser."""
