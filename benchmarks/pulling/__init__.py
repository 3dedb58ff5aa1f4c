"""How soon a new ComfyUI server, to which all is empty, serves engines that another one has built."""
