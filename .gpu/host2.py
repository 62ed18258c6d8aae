import statistics
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnlib import attention, dispatch
from attnlib.bench.gradient_oracle import GradientOracle
from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape
from attnlib.dispatch import Saved
from attnlib.params import Params, mask_window

dev='cuda'
# correctness, several calls each (first = triton's way, then direct)
for dt in ('float16','bfloat16'):
  for D in (64,80,128,256):
    for c in (True,False):
      for S,Sk in ((300,300),(777,1000)):
        s=Shape(2,4,S,D,c,dt,2,Sk); q,k,v=make_inputs(s,device=dev); do=torch.randn_like(q)
        orc=Oracle(q,k,v,c); g=GradientOracle(do,q,k,v,c)
        for impl in ('hopper','triton'):
          for rep in range(3):
            a=[x.detach().requires_grad_() for x in (q,k,v)]
            o,l=attention(*a,causal=c,return_lse=True,impl=impl)
            orc.judge(o,l).raise_if_bad(f'{impl} {D} {c} {S} {rep}')
            dq,dk,dv=torch.autograd.grad(o,a,do)
            for n,vd in g.judge(dq,dk,dv).items(): vd.raise_if_bad(f'{impl} {n} {D} {c} {S} {rep}')
from attnlib.kernels.common import direct, launcher

print('correct; direct launcher:',direct.launcher(), 'kernels', {k:len(v) for k,v in launcher.compiled_kernels().items()})
CALLS=[('B1 S777 H48 D128 dense',1,48,777,128,False),('B2 S2048 H16 D128 causal',2,16,2048,128,True),('B3 S1777 H20 D64 causal',3,20,1777,64,True),('B1 S300 H24 D128 causal',1,24,300,128,True)]
def loop1(fn,n=200):
    torch.cuda.synchronize(); t=time.perf_counter()
    for _ in range(n): fn()
    torch.cuda.synchronize(); return (time.perf_counter()-t)/n*1e6
def loops(fns,reps=9,n=200):
    for f in fns:
        for _ in range(30): f()
    out=[[] for _ in fns]
    for _ in range(reps):
        for o,f in zip(out,fns): o.append(loop1(f,n))
    return ' '.join(f"{statistics.median(o):.0f}[{min(o):.0f}-{max(o):.0f}]" for o in out)
def host(fn,n=60,reps=9):
    for _ in range(10): fn()
    out=[]
    for _ in range(reps):
        torch.cuda.synchronize(); t=time.perf_counter()
        for _ in range(n): fn()
        out.append((time.perf_counter()-t)/n*1e6); torch.cuda.synchronize()
    return f"{statistics.median(out):.1f}[{min(out):.1f}]"
for name,B,H,S,D,c in CALLS:
    q,k,v=(torch.randn(B,H,S,D,device=dev,dtype=torch.bfloat16,requires_grad=True) for _ in range(3))
    out,lse=attention(q,k,v,causal=c,return_lse=True); do=torch.randn_like(out)
    g=lambda: torch.autograd.grad(out,(q,k,v),do,retain_graph=True)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]): oc=F.scaled_dot_product_attention(q,k,v,is_causal=c)
    gc=lambda: torch.autograd.grad(oc,(q,k,v),do,retain_graph=True)
    sv=Saved(*(x.detach() for x in (q,k,v,out,lse))); p=Params(mask_window(c,None),D**-.5,return_lse=True)
    raw=lambda: dispatch.backward(do,sv,p)
    qd,kd,vd=sv[:3]
    fw=lambda: attention(qd,kd,vd,causal=c)
    print(name,'| ours, cudnn, raw:',loops([g,gc,raw]),'| host raw',host(raw),'fwd host',host(fw),flush=True)
    with torch.autograd.set_multithreading_enabled(False): print('   single thread ours, cudnn:',loops([g,gc]),flush=True)
import cProfile
import pstats

p=cProfile.Profile()
torch.cuda.synchronize(); p.enable()
for _ in range(300): raw()
p.disable(); torch.cuda.synchronize()
pstats.Stats(p).sort_stats('tottime').print_stats(14)
import torch.nn as nn


class Layer(nn.Module):
    def __init__(s,d,h,att): super().__init__(); s.n1=nn.LayerNorm(d); s.qkv=nn.Linear(d,3*d,bias=False); s.o=nn.Linear(d,d,bias=False); s.n2=nn.LayerNorm(d); s.f=nn.Sequential(nn.Linear(d,4*d),nn.GELU(),nn.Linear(4*d,d)); s.h=h; s.att=att
    def forward(s,x):
        b,t,d=x.shape; q,k,v=(y.view(b,t,s.h,-1).transpose(1,2) for y in s.qkv(s.n1(x)).chunk(3,-1))
        x=x+s.o(s.att(q,k,v).transpose(1,2).reshape(b,t,d)); return x+s.f(s.n2(x))
def sd(q,k,v): return F.scaled_dot_product_attention(q,k,v,is_causal=True)
def ours(q,k,v): return attention(q,k,v,causal=True)
for b in (1,4):
    steps=[]
    for att in (sd,ours,sd,ours):
        torch.manual_seed(0); net=nn.Sequential(*[Layer(768,12,att) for _ in range(12)]).to(dev,torch.bfloat16)
        x=torch.randn(b,1024,768,device=dev,dtype=torch.bfloat16)
        steps.append(lambda net=net,x=x: net(x).float().pow(2).mean().backward())
    print('12 layers, B',b,'sdpa ours sdpa ours',loops(steps,9,10),flush=True)
