// One invocation per element.
let i = group * SIZE + thread;
if (i < COUNT) {
    store(i);
}
