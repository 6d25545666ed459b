"""What bench.py --gpu-report measures on a GPU, and the page that shows it"""
