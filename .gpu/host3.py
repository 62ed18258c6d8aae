import cProfile
import pstats
import statistics
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnlib import attention, autograd, dispatch
from attnlib.dispatch import Saved
from attnlib.params import Params, mask_window

dev='cuda'
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
B,H,S,D,c=1,24,300,128,True
q,k,v=(torch.randn(B,H,S,D,device=dev,dtype=torch.bfloat16,requires_grad=True) for _ in range(3))
out,lse=attention(q,k,v,causal=c,return_lse=True); do=torch.randn_like(out)
g=lambda: torch.autograd.grad(out,(q,k,v),do,retain_graph=True)
with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]): oc=F.scaled_dot_product_attention(q,k,v,is_causal=c)
gc_=lambda: torch.autograd.grad(oc,(q,k,v),do,retain_graph=True)
sv=Saved(*(x.detach() for x in (q,k,v,out,lse))); P=Params(mask_window(c,None),D**-.5,return_lse=True)
raw=lambda: dispatch.backward(do,sv,P)
raw3=lambda: [x.data_ptr() for x in dispatch.backward(do,sv,P)]
class Nop(torch.autograd.Function):
    @staticmethod
    def forward(q,k,v,z): return torch.empty_like(q), torch.empty(1,device=dev)
    @staticmethod
    def setup_context(ctx,i,o):
        ctx.save_for_backward(*i[:3],*o); ctx.mark_non_differentiable(o[1])
    @staticmethod
    def backward(ctx,d,_):
        a=ctx.saved_tensors
        return torch.empty_like(a[0]),torch.empty_like(a[1]),torch.empty_like(a[2]),None
on=Nop.apply(q,k,v,None)[0]
gn=lambda: torch.autograd.grad(on,(q,k,v),do,retain_graph=True)
class Raw(Nop):
    @staticmethod
    def backward(ctx,d,_):
        a=ctx.saved_tensors
        return *dispatch.backward(d,sv,P),None
orr=Raw.apply(q,k,v,None)[0]
gr=lambda: torch.autograd.grad(orr,(q,k,v),do,retain_graph=True)
m=q*k*v
gm=lambda: torch.autograd.grad(m,(q,k,v),do,retain_graph=True)
print('multi: ours cudnn raw nop rawfn mul',loops([g,gc_,raw,gn,gr,gm]),flush=True)
with torch.autograd.set_multithreading_enabled(False): print('single:',loops([g,gc_,raw,gn,gr,gm]),flush=True)
# time in the body
T=[]
orig=autograd.AttentionGradient.forward
def timed(*a):
    t=time.perf_counter(); r=orig(*a); T.append((time.perf_counter()-t)*1e6); return r
autograd.AttentionGradient.forward=staticmethod(timed)
for mode in (True,False):
    with torch.autograd.set_multithreading_enabled(mode):
        T.clear(); loop1(g,300); print('body in autograd, multi' if mode else 'single',f'{statistics.median(T):.1f} min {min(T):.1f} p90 {sorted(T)[270]:.1f}')
        # with sync each: not queue bound
        T.clear()
        for _ in range(100): g(); torch.cuda.synchronize()
        print('   synced each', f'{statistics.median(T):.1f}')
autograd.AttentionGradient.forward=orig
T2=[]
for _ in range(300):
    t=time.perf_counter(); raw(); T2.append((time.perf_counter()-t)*1e6)
print('raw per call',f'{statistics.median(T2):.1f} min {min(T2):.1f}')
T2=[]
for _ in range(100):
    torch.cuda.synchronize(); t=time.perf_counter(); raw(); T2.append((time.perf_counter()-t)*1e6)
print('raw per call synced before',f'{statistics.median(T2):.1f} min {min(T2):.1f}')
pr=cProfile.Profile()
with torch.autograd.set_multithreading_enabled(False):
    pr.enable()
    for _ in range(300): g()
    pr.disable()
pstats.Stats(pr).sort_stats('tottime').print_stats(16)
pr=cProfile.Profile(); pr.enable()
for _ in range(300): raw()
pr.disable()
pstats.Stats(pr).sort_stats('tottime').print_stats(12)
