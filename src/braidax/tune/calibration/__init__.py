"""What a machine can do: rates of links, products, copies, its disk and its cores, measured once and kept."""
